package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	api "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

const driverName = "gpu.nvidia.com"

// driver is a DRA driver. It publishes devices with the names and attributes of NVIDIA's driver, and logs each claim.
type driver struct{}

func (driver) PrepareResourceClaims(_ context.Context, claims []*api.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		var devices []kubeletplugin.Device
		for _, each := range claim.Status.Allocation.Devices.Results {
			log.Printf("prepared %s %s", claim.UID, each.Device)
			devices = append(devices, kubeletplugin.Device{Requests: []string{each.Request}, PoolName: each.Pool, DeviceName: each.Device})
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return results, nil
}

func (driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		log.Printf("unprepared %s", claim.UID)
		results[claim.UID] = nil
	}
	return results, nil
}

func (driver) HandleError(_ context.Context, err error, message string) {
	log.Print(message, ": ", err)
}

func (driver) WatchHealthStatus(ctx context.Context, _ chan<- kubeletplugin.DeviceHealthReport) error {
	<-ctx.Done()
	return nil
}

// serveClaims runs the DRA driver on the node, and publishes one device of the product for each id.
func serveClaims(kubeconfig, node, product string, ids []string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	if err = os.MkdirAll(filepath.Join(kubeletplugin.KubeletPluginsDir, driverName), 0o700); err != nil {
		return err
	}
	ctx := context.Background()
	helper, err := kubeletplugin.Start(ctx, driver{}, kubeletplugin.DriverName(driverName), kubeletplugin.NodeName(node), kubeletplugin.KubeClient(client))
	if err != nil {
		return err
	}
	slice := resourceslice.Slice{}
	for number, id := range ids {
		slice.Devices = append(slice.Devices, card(number, id, product))
	}
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{slice}}
	if err = helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: pool}}); err != nil {
		return err
	}
	<-ctx.Done()
	return errors.New("the driver ended")
}

func card(number int, id, product string) api.Device {
	attributes := map[api.QualifiedName]api.DeviceAttribute{}
	for name, value := range map[api.QualifiedName]string{"type": "gpu", "productName": product, "uuid": id, "brand": "Nvidia"} {
		attributes[name] = api.DeviceAttribute{StringValue: &value}
	}
	memory := map[api.QualifiedName]api.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}}
	return api.Device{Name: fmt.Sprintf("gpu-%d", number), Attributes: attributes, Capacity: memory}
}
