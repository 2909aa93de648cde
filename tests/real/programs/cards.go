package main

import (
	"context"
	"log"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// cards is a device plugin. It sets NVIDIA_VISIBLE_DEVICES in each container, as the device plugin of NVIDIA does.
type cards struct {
	api.UnimplementedDevicePluginServer
	ids []string
}

func (c *cards) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (c *cards) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	list := &api.ListAndWatchResponse{}
	for _, id := range c.ids {
		list.Devices = append(list.Devices, &api.Device{ID: id, Health: api.Healthy})
	}
	if err := stream.Send(list); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (c *cards) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, each := range request.ContainerRequests {
		ids := strings.Join(each.DevicesIds, ",")
		log.Printf("allocated %s", ids)
		envs := map[string]string{"NVIDIA_VISIBLE_DEVICES": ids}
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{Envs: envs})
	}
	return response, nil
}

// offer serves the device plugin, and registers it with the kubelet. It returns when the kubelet restarts, because the
// kubelet deletes the sockets of all device plugins at its start.
func offer(resource string, ids []string) error {
	endpoint := strings.ReplaceAll(resource, "/", "-") + ".sock"
	socket := filepath.Join(api.DevicePluginPath, endpoint)
	os.Remove(socket)
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, &cards{ids: ids})
	defer server.Stop()
	go server.Serve(listener)
	connection, err := grpc.NewClient("unix://"+api.KubeletSocket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	request := &api.RegisterRequest{Version: api.Version, Endpoint: endpoint, ResourceName: resource}
	if _, err = api.NewRegistrationClient(connection).Register(context.Background(), request); err != nil {
		return err
	}
	for err == nil {
		time.Sleep(100 * time.Millisecond)
		_, err = os.Stat(socket)
	}
	return err
}
